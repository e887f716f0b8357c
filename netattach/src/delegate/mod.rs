//! Runs other CNI plugins as the specification says. The only module that starts processes.
