//! The only module that talks to BPF.
