//! Links that a pod has created on a device of the node that goes back without them: macvlans, VLANs and the like
//! would send and receive through the device there, and an XDP program on one of them prevents detaching any other
//! program from the device (`dev_xdp_attach` of the kernel).

use std::os::fd::AsFd;

use super::claims::Other;
use crate::attach::StepError;
use crate::error_chain::Chain;
use crate::netlink::{Above, DeviceState, Handle};
use crate::netns::Netns;

/// How often links are searched: the pod may be creating them meanwhile.
const ROUNDS: usize = 16;

/// Removes a device in a pod from its bridge or other controller, and deletes the links that are on it, or may be;
/// the kernel then deletes the links above these. `others`: further devices of the node that the pod holds, which
/// stay.
///
/// # Errors
/// The kernel does not list the links, or refuses to delete one.
pub(super) fn remove(pod: &mut Handle, device: &DeviceState, others: &[Other]) -> Result<(), StepError> {
    let index = device.link.index;
    if device.link.controller.is_some()
        && let Err(error) = pod.ensure_no_controller(index)
    {
        // Moving the device removes it from its controller.
        tracing::debug!(device = device.link.name, error = %Chain(&error), "the device is a port in its pod still");
    }
    delete(pod, index, None, others)
}

/// Deletes the links in a pod's namespace that are on a device which is back in the calling thread's namespace: they
/// were created during the move, or could not be deleted before it.
///
/// # Errors
/// As for [`remove`].
pub(super) fn remove_beyond(netns: &Netns, index: u32, others: &[Other]) -> Result<(), StepError> {
    delete(&mut Handle::open_in(netns)?, index, Some(&Netns::current()?), others)
}

/// `of`: the namespace of the device; `None`: the pod's own.
fn delete(pod: &mut Handle, index: u32, of: Option<&Netns>, others: &[Other]) -> Result<(), StepError> {
    let mut before = Vec::new();
    for _ in 0..ROUNDS {
        let above = on(pod, index, of, others)?;
        if above.is_empty() || above == before {
            break;
        }
        let links = above.len();
        tracing::info!(links, "a pod has links on a device of the node, which goes back; deleted");
        pod.ensure_indices_absent(&above)?;
        before = above;
    }
    Ok(())
}

fn on(pod: &mut Handle, index: u32, of: Option<&Netns>, others: &[Other]) -> Result<Vec<u32>, StepError> {
    let is_of_node = |own: u32, kind: &str, alias: &str| {
        others.iter().any(|Other { home, made }| {
            // A pod can give aliases to links that it has created.
            let is_it = made.map_or(home.name == alias, |made| made == own);
            is_it && home.kind == kind
        })
    };
    // A link whose attributes the kernel cannot report is not a device of the node, unless the pod has changed it so;
    // the pod could delete such a device as well.
    let found = pod.links_on(index, |own, kind, alias| !is_of_node(own, kind, alias))?;
    // Asked after the dump: a namespace gets an id only when a link is reported that refers to it.
    let number = of.map(|netns| pod.number_of(netns.as_fd())).transpose()?;
    let is_on = |it: &Above| match number {
        // The device itself is on no other device in its pod.
        None if it.is_blurred => it.index != index,
        None => it.netns.is_none(),
        Some(number) => it.is_blurred || (number.is_some() && it.netns == number),
    };
    Ok(found.into_iter().filter(is_on).map(|it| it.index).collect())
}

#[cfg(test)]
mod tests {
    use super::super::take_device::home;
    use super::*;
    use crate::netlink::LinkState;
    use crate::netns::within;
    use crate::spec::{Bridge, Macvlan};
    use crate::step::Home;

    /// Makes a macvlan of `parent`, which is where `host` is, in that namespace.
    fn macvlan(host: &mut Handle, (number, parent): (u16, &LinkState), to: &Netns) {
        let macvlan = Macvlan::plain(&format!("lan{number}"), &parent.name);
        let mut inside = Handle::open_in(to).unwrap();
        host.create_macvlan(&macvlan, parent, to.as_fd(), &mut inside).unwrap();
    }

    fn parent(host: &mut Handle, name: &str) -> LinkState {
        let bridge = Bridge { name: name.to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
        host.ensure_bridge(&bridge).unwrap().link
    }

    fn names(netns: &Netns) -> Vec<String> {
        let links = Handle::open_in(netns).unwrap().links().unwrap().into_iter();
        let mut names: Vec<String> = links.filter(|link| link.kind == "macvlan").map(|it| it.name).collect();
        names.sort();
        names
    }

    /// Rows: HDV-above.
    #[test]
    fn what_is_on_a_device_goes_and_other_devices_of_the_node_stay() {
        let [node, netns] = [(); 2].map(|()| Netns::private().unwrap());
        let [mut host, mut pod] = [&node, &netns].map(|it| Handle::open_in(it).unwrap());
        let card = parent(&mut pod, "net1");
        let other = parent(&mut pod, "net2");
        for (number, on) in [(5, &card), (6, &card), (7, &card), (8, &other)] {
            macvlan(&mut pod, (number, on), &netns);
        }
        let [given, other_one] = ["lan5", "lan6"].map(|name| pod.device_named(name).unwrap().unwrap());
        // The second is the pod's own, whatever it says.
        for link in [&given.link, &other_one.link] {
            pod.set_alias(link.index, "card.5").unwrap();
        }
        let made = Some(given.link.index);
        let of_node = Home { name: "card.5".to_owned(), ..home(given, false) };
        let others = [Other { home: of_node.clone(), made }];
        let unknown = [Other { home: of_node, made: None }];
        // One of the node's that has the index of the device in the pod.
        let beneath = parent(&mut host, "card");
        macvlan(&mut host, (9, &beneath), &netns);
        let device = pod.device_named("net1").unwrap().unwrap();
        assert_eq!(names(&netns), ["lan5", "lan6", "lan7", "lan8", "lan9"]);
        remove(&mut pod, &device, &others).unwrap();
        assert_eq!(names(&netns), ["lan5", "lan8", "lan9"]);
        within(&node, || remove_beyond(&netns, beneath.index, &others)).unwrap().unwrap();
        assert_eq!(names(&netns), ["lan5", "lan8"]);
        remove(&mut pod, &device, &unknown).unwrap();
        assert_eq!(names(&netns), ["lan5", "lan8"]);
        remove(&mut pod, &device, &[]).unwrap();
        assert_eq!(names(&netns), ["lan8"]);
    }

    /// Rows: HDV-above.
    #[test]
    fn a_device_of_which_it_cannot_be_told_what_it_is_on_is_not_on_itself() {
        let [node, netns] = [(); 2].map(|()| Netns::private().unwrap());
        let [mut host, mut pod] = [&node, &netns].map(|it| Handle::open_in(it).unwrap());
        let wire = parent(&mut host, "wire");
        macvlan(&mut host, (1, &wire), &netns);
        let device = pod.device_named("lan1").unwrap().unwrap();
        pod.give_sources(device.link.index, 6_000);
        remove(&mut pod, &device, &[]).unwrap();
        assert_eq!(names(&netns), ["lan1"]);
        // As if a pod had created it on a device that is back on the node now.
        within(&node, || remove_beyond(&netns, wire.index, &[])).unwrap().unwrap();
        assert_eq!(names(&netns), Vec::<String>::new());
    }
}
