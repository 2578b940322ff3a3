"""The stage `check`: the simulator held against real servers."""
