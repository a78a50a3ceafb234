"""What several pages share: settings, controls, theme, scripted components."""
