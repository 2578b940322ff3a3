"""The coefficients of the policy reuse, fitted on recorded routing."""
