"""Generation: the plain and the speculative loop, who proposes, how wide, and what it cost."""
