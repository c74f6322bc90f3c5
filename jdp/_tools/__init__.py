"""The tools: they look at jdp's programs and machines, plan them, run them again, and print what they find."""
