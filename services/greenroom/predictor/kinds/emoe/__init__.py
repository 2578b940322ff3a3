"""Learned expert predictors (eMoE, section 3.2.2): a transformer over a model's layers, by task type.

``networks``, ``training`` and ``job`` need torch and transformers; nothing else here does, and they are imported only
where something is trained or forecast.
"""
