//! The requests of attachments to the node's forwarding.

use super::plugins::PluginError;
use crate::attach::{Node, StepError};
use crate::firewall::{self, Firewall, Owner};
use crate::journal::Record;
use crate::plan::{AttachmentPlan, Sandbox, result};
use crate::step::{Admit, Admitted, Brought, Output, Step};
use crate::waits::{self, Resource};

/// Returns the comment of the attachment's rules.
fn note(owner: &Owner, sandbox: &Sandbox, attachment: &AttachmentPlan) -> String {
    owner.note(&attachment.config_name, &sandbox.container_id, &attachment.ifname)
}

fn note_on(node: &Node, sandbox: &Sandbox, attachment: &AttachmentPlan) -> String {
    match &node.firewall {
        Some(firewall) => note(firewall.owner(), sandbox, attachment),
        None => note(&Owner::executables(), sandbox, attachment),
    }
}

/// Makes the agent take over the rules of the attachments in a record. If `has_all` is false, because the record is
/// to be rolled back, existing rules stay and no missing ones are added, as the addresses may be another pod's now.
/// But a bridge stays closed until the links of its pods are gone; `is_there` tells which attachments' links may
/// exist.
pub(in crate::attach) fn adopt(
    firewall: &Firewall,
    record: &Record,
    has_all: bool,
    is_there: &dyn Fn(&AttachmentPlan) -> bool,
) {
    for (at, attachment, step) in record.plan.steps() {
        let Step::Admit(_) = step else { continue };
        let note = note(firewall.owner(), &record.plan.sandbox, attachment);
        let closes = |admitted: &Admitted| admitted.closed.is_some() && is_there(attachment);
        match record.outputs.get(&at) {
            Some(Output::Admitted(admitted)) if has_all || closes(admitted) => {
                firewall.adopt(note, admitted.clone());
            }
            _ => firewall.keep(note),
        }
    }
}

/// Makes the node forward as an attachment requests, according to the outputs of earlier steps.
pub(super) fn attach(
    node: &Node,
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    admit: &Admit,
    outputs: Brought<'_>,
) -> Result<Admitted, StepError> {
    let now = result::result(sandbox, attachment, outputs)
        .map_err(|source| PluginError::Result { plugin: attachment.kind.clone(), source })?;
    let admitted = firewall::admitted(admit, &now)?;
    firewall::check_effect(admit)?;
    let note = note_on(node, sandbox, attachment);
    waits::at(&Resource::PacketFilter, || match &node.firewall {
        Some(firewall) => firewall.attach(note, admitted.clone()),
        None => firewall::admit(&note, &admitted),
    })?;
    Ok(admitted)
}

/// Removes the forwarding rules of an attachment.
pub(in crate::attach) fn detach(
    node: &Node,
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
) -> Result<(), StepError> {
    let note = note_on(node, sandbox, attachment);
    let detached = waits::at(&Resource::PacketFilter, || match &node.firewall {
        Some(firewall) => firewall.detach(&note),
        None => firewall::dismiss(&note),
    });
    Ok(detached?)
}

/// Describes what the node lacks of these rules.
pub(in crate::attach) fn difference(
    node: &Node,
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    admitted: &Admitted,
) -> Result<Option<String>, StepError> {
    let note = note_on(node, sandbox, attachment);
    Ok(waits::at(&Resource::PacketFilter, || firewall::difference(&note, admitted))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::rig;
    use crate::journal::Store;
    use crate::netns::{Netns, within};
    use crate::plan::fixtures;
    use crate::step::Outputs;
    use crate::sync::Arc;
    use crate::waits::tests::Visits;

    /// Whether this kernel has a packet filter or not.
    #[test]
    fn who_waits_for_the_packet_filter_has_no_place_to_work_in() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Store::open(directory.path().join("journal")).unwrap();
        let engine = rig::engine(directory.path(), journal, &Arc::new(rig::Maps::default()));
        let (sandbox, attachment) = (fixtures::sandbox("a"), fixtures::attachment("bridge", Vec::new()));
        let (admit, outputs) = (Admit { beside_firewalld: true, ..Admit::default() }, Outputs::default());
        let admitted = Admitted { addresses: Vec::new(), admin_chain: "CNI-ADMIN".to_owned(), closed: None };
        let visits = std::sync::Arc::<Visits>::default();
        let place = std::sync::Arc::clone(&visits);
        within(&Netns::private().unwrap(), || {
            waits::within(place, || {
                let of = (&sandbox, &attachment);
                let _ = attach(&engine.node, of, &admit, outputs.of(0));
                let _ = difference(&engine.node, of, &admitted);
                let _ = detach(&engine.node, &sandbox, &attachment);
            });
        })
        .unwrap();
        assert_eq!(visits.all(), vec![Resource::PacketFilter; 3]);
    }
}
