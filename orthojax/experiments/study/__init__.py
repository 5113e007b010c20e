"""Trained models, calculations and what is measured of them, resumable and shared between experiments."""
