"""Files that methods load: trained artefacts, calibrations, fits and similarities, with their formats."""
