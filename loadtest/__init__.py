"""Load on a Draftwire server, from outside: it speaks only the wire."""
