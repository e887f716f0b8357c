//! The CNI specification as data and pure functions: requests, configurations, results, versions, errors.
