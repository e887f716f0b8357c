//! The only module that talks rtnetlink.
