"""Another trainer's samples, replayed by the training stack: which part differs, and why?"""
