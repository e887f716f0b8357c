//! The multi-network standard (NPWG) as data and pure functions.
