"""Arrays shared with other libraries: DLPack in both directions, array interfaces, buffers.

Knows memory by its address and needs no framework and no GPU. `Exporter` gives, `take` takes;
`kvcore.leases` adds streams and lifetimes to pool memory, `kvcore.device` makes its own arrays of
what was taken.
"""
