"""Arms as child processes: started, told what to do, held to deadlines and to a memory limit."""
