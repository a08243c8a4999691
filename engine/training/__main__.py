"""`draftwire train-draft`, the part that needs torch. See `engine.training.run`."""

from engine.training.run import main

if __name__ == "__main__":
    main()
