"""eMoE: experts by forecast of the tasks that are here, and scheduling by SLO."""
