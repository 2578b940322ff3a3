from benchmarks.formats.cli import main

main()
