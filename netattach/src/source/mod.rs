//! Where pods, networks and policies come from.
