//! An agent that dies in the middle: after that step its operations have no effect.

use std::io;
// The standard library's types are used here: the model itself is not under test.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The life of one agent, shared by everything that it has open.
#[derive(Debug, Clone, Default)]
pub(crate) struct Life(Arc<AtomicBool>);

impl Life {
    /// Ends the agent between any two steps.
    pub(crate) fn end(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// To be called within the step itself, so that the agent cannot end between this and the effect.
    ///
    /// # Errors
    /// The agent has ended.
    pub(crate) fn goes_on(&self) -> io::Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(io::Error::other("the agent has ended")) } else { Ok(()) }
    }
}
