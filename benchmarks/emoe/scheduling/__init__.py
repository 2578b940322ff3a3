"""The stage `scheduling`: schedulers in simulated time (eMoE, Fig. 12), and the simulator."""
