"""Chances of the next layers from several predictors at once, blended by a fit: what DuoServe and ExpertFlow share."""
