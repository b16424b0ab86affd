"""The presets: one TOML file each, in the shape of ``rung.config.Config``."""
