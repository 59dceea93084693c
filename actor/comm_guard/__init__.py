"""Keeps collectives from dying for want of driver memory, at the price of a probe only where evidence asks for one."""
