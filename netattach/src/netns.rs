//! Network namespaces: opening, identifying, entering. The only module that calls `setns`.
