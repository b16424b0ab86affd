"""Looking closer when something is wrong: where a value stopped being finite, and a bad step run again."""
