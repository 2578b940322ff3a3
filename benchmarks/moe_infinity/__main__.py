from benchmarks.moe_infinity.cli import main

if __name__ == "__main__":
    main()
