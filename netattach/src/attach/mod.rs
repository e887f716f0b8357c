//! Carries plans out, and takes them back.
