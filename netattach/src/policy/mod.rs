//! MultiNetworkPolicy: model, selection, compilation to classes. Pure up to `sync`.

pub mod compiled;
