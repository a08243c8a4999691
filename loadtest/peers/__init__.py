"""Who can be compared: Draftwire and other engines, each in processes of its own."""
