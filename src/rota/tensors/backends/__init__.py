"""What a GPU does for the plane, behind one protocol: CUDA itself, and a stand-in on CPU that enforces its rules."""
