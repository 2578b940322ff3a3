"""A collaboration on simulated executors and a simulated link: the dispatchers' own decisions on a virtual clock."""
