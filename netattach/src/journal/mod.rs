//! What was planned for and done to each sandbox, across crashes.
