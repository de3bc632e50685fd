"""The tensor plane's decisions as values: what a name may be, how memory is cut, the protocol as a pure machine."""
