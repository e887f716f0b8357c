//! Which request may begin, and which has to wait.
//!
//! | module | what it does |
//! |---|---|
//! | `turns` | one operation at a time per container |
//! | `lanes` | how many operations work at a time, and what each one waits for |
//! | `scheduler` | suspends and wakes operations, as these decide |
//! | `places` | how many requests wait and run at a time, by kind |
//! | `required_status` | whether an ADD that needs its status written begins while the API server does not answer |

pub(super) mod lanes;
pub(super) mod places;
pub(super) mod required_status;
pub(super) mod scheduler;
mod turns;
