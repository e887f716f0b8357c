//! Detaching and finishing without a request.
//!
//! | module | what it does |
//! |---|---|
//! | `left_over` | finishes operations that an earlier agent had begun |
//! | `waiting_dels` | DELs recorded while no agent answered |
//! | `collector` | detaches sandboxes for which no runtime will send a DEL |

pub(super) mod collector;
pub(super) mod left_over;
mod waiting_dels;
