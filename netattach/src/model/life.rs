//! An agent that ends in the middle: from some step on nothing that it does comes to anything.

use std::io;
// The model's own, not the modelled.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The life of one agent, of which everything that it has open knows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Life(Arc<AtomicBool>);

impl Life {
    /// Ends it between any two steps.
    pub(crate) fn end(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// To be asked in the step itself: nobody ends it between this and the effect.
    ///
    /// # Errors
    /// It is over.
    pub(crate) fn goes_on(&self) -> io::Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(io::Error::other("the agent has ended")) } else { Ok(()) }
    }
}
