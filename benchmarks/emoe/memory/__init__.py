"""The stage `memory`: a share of the experts in memory (eMoE, Figs 13-16)."""
