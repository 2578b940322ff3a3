"""Learned expert predictors (eMoE, section 3.2.2): a transformer over a model's layers, by task type.

``networks`` and ``training`` need torch and transformers, and are imported only where something is trained or forecast.
"""
