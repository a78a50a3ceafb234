"""Questions with known answers: the small world, and the judging of what a lane answers. Judging imports no torch."""
