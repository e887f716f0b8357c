//! The requests of attachments to the node's address translation.

use std::net::IpAddr;

use crate::attach::addresses::occupied::segment;
use crate::attach::addresses::own;
use crate::attach::{Node, StepError};
use crate::error_chain::Chain;
use crate::journal::Record;
use crate::nat::wish::{Left, NoAddress, Wish};
use crate::nat::without_agent::{self, Plugin, Whose};
use crate::nat::{Holder, Key, Nat, NatError};
use crate::netlink::Handle;
use crate::plan::{AttachmentPlan, Sandbox, result};
use crate::step::{Brought, LeasedAddress, Step, Translate};

/// Returns the attachment in the form of the address translation.
pub(super) fn holder(sandbox: &Sandbox, attachment: &AttachmentPlan) -> Holder {
    let container = &sandbox.container_id;
    let pod = sandbox.pod.as_ref().map(|pod| format!("pod {pod}, ")).unwrap_or_default();
    Holder {
        key: Key { container: container.clone(), ifname: attachment.ifname.clone() },
        who: format!("{pod}container {container}, interface {}", attachment.ifname),
    }
}

/// Makes the address translation take over the elements of the attachments in a record.
pub(in crate::attach) fn adopt(nat: &Nat, record: &Record) {
    for (at, attachment, step) in record.plan.steps() {
        let Step::Translate(translate) = step else { continue };
        if !record.has_begun(at) {
            continue;
        }
        let outputs = record.outputs.of(at.0);
        let leased = match result::leased(attachment, outputs) {
            Ok(leased) => leased,
            Err(error) => {
                let (container, ifname) = (&record.plan.sandbox.container_id, &attachment.ifname);
                tracing::warn!(container, ifname, error = %Chain(&error), "translation not taken over");
                continue;
            }
        };
        let translate = result::translation(translate, outputs);
        match wish((&record.plan.sandbox, attachment), &translate, &leased.addresses) {
            Ok(wish) => nat.adopt(&holder(&record.plan.sandbox, attachment), wish),
            // The record has lost the lines that contained the addresses.
            Err(error) => {
                tracing::warn!(ifname = attachment.ifname, error = %Chain(&error), "translation not taken over")
            }
        }
    }
}

/// Returns the elements for an attachment. Traffic to its own subnets is not masqueraded, and if it follows the
/// node's exceptions, these subnets become exceptions for all pods. On a routed link, whose subnets are checked
/// nowhere else, pods must not choose them through the prefix length of a requested address.
fn wish(
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    translate: &Translate,
    leased: &[LeasedAddress],
) -> Result<Wish, NoAddress> {
    if translate.masquerade.is_none() || translate.bridged {
        return Wish::new(translate, leased);
    }
    let alone = translate.follows_node;
    Wish::new(translate, &result::in_subnets_of_author(sandbox, attachment, leased, alone))
}

/// Makes the address translation keep guarding the devices of a record that is to be rolled back.
pub(in crate::attach) fn guard(nat: &Nat, record: &Record) {
    for (at, attachment, step) in record.plan.steps() {
        if let Step::Translate(translate) = step
            && record.has_begun(at)
            && !translate.ports.is_empty()
        {
            let translate = result::translation(translate, record.outputs.of(at.0));
            if translate.device.is_empty() {
                continue;
            }
            nat.guard(&holder(&record.plan.sandbox, attachment), &translate.device);
        }
    }
}

/// Makes the node translate addresses as an attachment requests.
pub(super) fn attach(
    node: &Node,
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    translate: &Translate,
    leased: &[LeasedAddress],
) -> Result<(), StepError> {
    let wish = wish((sandbox, attachment), translate, leased).map_err(NatError::from)?;
    match &node.nat {
        Some(nat) => Ok(nat.attach(&holder(sandbox, attachment), wish)?),
        None => Ok(without_agent::attach(&whose(sandbox, attachment), &wish)?),
    }
}

/// Removes the node's address translation for an attachment, whether or not its record was adopted: its addresses are
/// free afterwards. `outputs`: what is known of its steps.
pub(in crate::attach) fn detach(
    node: &Node,
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    step: &Step,
    outputs: Brought<'_>,
) -> Result<(), StepError> {
    let Some(nat) = &node.nat else {
        return Ok(without_agent::detach(&whose(sandbox, attachment))?);
    };
    let key = holder(sandbox, attachment).key;
    if let Step::Translate(translate) = step
        && nat.may_have_left(&key)
    {
        let addresses = own::own(node, (sandbox, attachment), outputs, segment(attachment, outputs))?;
        nat.sweep(&Left { translate, addresses })?;
    }
    Ok(nat.detach(&key)?)
}

/// Returns the attachment in the form of the table that processes without an agent share.
fn whose<'a>(sandbox: &'a Sandbox, attachment: &'a AttachmentPlan) -> Whose<'a> {
    Whose {
        plugin: Plugin::Link,
        network: &attachment.config_name,
        container: &sandbox.container_id,
        ifname: &attachment.ifname,
    }
}

/// Returns the name of the device through which the node reaches an interface with these addresses; empty: through
/// none, and ports at 127.0.0.1 are not mapped.
pub(in crate::attach) fn reach(host: &mut Handle, addresses: &[IpAddr]) -> Result<String, StepError> {
    for address in addresses {
        if let Some(index) = host.device_towards(*address)? {
            return Ok(host.link_by_index(index)?.name);
        }
    }
    Ok(String::new())
}

/// Describes what the node lacks of an attachment's requests.
pub(in crate::attach) fn difference(
    node: &Node,
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    (translate, leased): &(Translate, Vec<LeasedAddress>),
) -> Result<Option<String>, StepError> {
    let wish = wish((sandbox, attachment), translate, leased).map_err(NatError::from)?;
    match &node.nat {
        Some(nat) => Ok(nat.difference(&wish)?),
        None => Ok(without_agent::difference(&whose(sandbox, attachment), &wish)?),
    }
}
