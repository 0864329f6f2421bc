"""The view of a run's trace. What is shown is made by functions that know no terminal (`run`,
`cells`, `page`, `facts`, `layermap`, `waterfall`, `versus`, `summary`): lines of spans with roles,
which widgets draw, and pictures and pages export. Nothing here imports torch."""
