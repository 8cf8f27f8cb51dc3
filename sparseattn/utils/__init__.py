"""Files, locks, hashes, devices and child processes: what any package needs. It imports nothing of this one."""
