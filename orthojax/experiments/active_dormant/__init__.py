"""Active-Dormant Attention Heads (Guo et al., arXiv 2410.13835): its simplified model and its theory."""
