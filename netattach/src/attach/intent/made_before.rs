//! The pod's default network if a plugin earlier in the runtime's list has created its interface (`defaultNetwork:
//! chained`).

use super::default_network::{CHAINED, DefaultNetwork};
use super::{IntentError, IntentReader, Network};
use crate::cni::multi_network::OWN_TYPE;
use crate::cni::{self, NetworkList, Version};

const PREV_RESULT: &str = "prevResult";

impl IntentReader {
    /// Returns the default network whose interface an earlier plugin has created for the pod of an ADD; `None`:
    /// netattach creates it.
    ///
    /// # Errors
    /// Both would create the interface, or neither; or the earlier plugin's result cannot be read.
    pub(super) fn made_before(&self, request: &cni::Request) -> Result<Option<Network>, IntentError> {
        let made = request.prev_result().map_err(IntentError::MadeBefore)?;
        match (self.default == DefaultNetwork::Chained, made.is_some()) {
            (false, false) => Ok(None),
            (false, true) => Err(IntentError::MadeTwice),
            (true, false) => Err(IntentError::NotMade),
            (true, true) => {
                let mut entry = request.config.clone();
                // The plan takes it from the request.
                entry.shift_remove(PREV_RESULT);
                let list = NetworkList::from_map(entry).map_err(IntentError::Entry)?;
                Ok(Some(Network::of_configuration(&request.name, list.into())))
            }
        }
    }
}

/// Returns a placeholder for the earlier plugin's network when there is no request: only the runtime knows that
/// network.
pub(super) fn any() -> Result<Network, IntentError> {
    let entry = [("cniVersion", Version::LATEST.as_str()), ("name", CHAINED), ("type", OWN_TYPE)];
    let entry = entry.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
    let list = NetworkList::from_map(entry).map_err(IntentError::Entry)?;
    Ok(Network::of_configuration(CHAINED, list.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::resolve::{Options, rehearse};
    use crate::step::{EnforceWhen, Step};

    #[test]
    fn it_stands_for_a_network_that_can_be_attached() {
        let planned = rehearse(&any().unwrap(), &Options::default()).unwrap().unwrap();
        let [Step::TakeMade(_), Step::FindDevice, Step::Protect(protect)] = planned.steps.as_slice() else {
            panic!("{:?}", planned.steps);
        };
        assert_eq!((protect.needed, protect.when), (false, EnforceWhen::Selected));
    }
}
