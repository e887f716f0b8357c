//! Which of a pod's devices each of its networks gets. Pure.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::messages::PodResources;

/// Most containers, and devices of one, that a message lists.
const SHOWN: usize = 8;

/// The devices of one resource that the kubelet gave to a container, in its order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerDevices {
    /// The container.
    pub container: String,
    /// The extended resource.
    pub resource: String,
    /// Ids of devices.
    pub ids: Vec<String>,
}

/// The device that a network of the pod needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want<'a> {
    /// The extended resource of the network.
    pub resource: &'a str,
    /// The device that the pod's selection names.
    pub named: Option<&'a str>,
}

/// A device for a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// Id of the device.
    pub id: String,
    /// The container that has it.
    pub container: String,
}

/// Why a network gets no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Shortage {
    /// The kubelet gave the pod none that is left.
    #[error(
        "no device of resource {resource} is left for the network: {wanted} networks of the pod need one, and its containers \
         were given {given}"
    )]
    NoneLeft {
        /// The resource.
        resource: String,
        /// How many networks of the pod need a device of the resource.
        wanted: usize,
        /// The devices of the containers, as text.
        given: String,
    },
    /// The selection names a device that the pod does not have.
    #[error(
        "deviceID {id} is no device of resource {resource} that the pod has: its containers were given {given}"
    )]
    NotThePods {
        /// The device.
        id: String,
        /// The resource.
        resource: String,
        /// The devices of the containers, as text.
        given: String,
    },
}

/// The devices of the containers of a pod.
pub fn devices(pod: PodResources) -> Vec<ContainerDevices> {
    let of_container = |container: super::messages::ContainerResources| {
        let name = container.name;
        container.devices.into_iter().map(move |devices| ContainerDevices {
            container: name.clone(),
            resource: devices.resource_name,
            ids: devices.device_ids,
        })
    };
    pod.containers.into_iter().flat_map(of_container).filter(|devices| !devices.ids.is_empty()).collect()
}

/// Gives each network its device: the one that its selection names, else the next of its resource that no other network
/// has, in the order of the kubelet. `wants` are in the order of the annotation, `None` for networks without a device;
/// `used` are the devices of attachments that the sandbox has already, with their resources.
///
/// # Errors
/// [`Shortage`], with the position of the network in `wants`.
pub fn allocate(
    wants: &[Option<Want<'_>>],
    devices: &[ContainerDevices],
    used: &BTreeSet<(String, String)>,
) -> Result<Vec<Option<Given>>, (usize, Shortage)> {
    let mut taken: BTreeSet<(&str, &str)> = used.iter().map(|(resource, id)| (&**resource, &**id)).collect();
    let named = wants.iter().flatten().filter_map(|want| Some((want.resource, want.named?)));
    taken.extend(named);
    let mut given = Vec::with_capacity(wants.len());
    for (position, want) in wants.iter().enumerate() {
        let Some(Want { resource, named }) = *want else {
            given.push(None);
            continue;
        };
        let mut of_resource = devices
            .iter()
            .filter(|devices| devices.resource == resource)
            .flat_map(|devices| devices.ids.iter().map(|id| (id, &devices.container)));
        let found = match named {
            Some(named) => of_resource.find(|(id, _)| *id == named),
            None => of_resource.find(|(id, _)| !taken.contains(&(resource, id.as_str()))),
        };
        let Some((id, container)) = found else {
            let (resource, given) = (resource.to_owned(), told(devices));
            let shortage = match named {
                Some(id) => Shortage::NotThePods { id: id.to_owned(), resource, given },
                None => {
                    let wanted = wants.iter().flatten().filter(|want| want.resource == resource).count();
                    Shortage::NoneLeft { resource, wanted, given }
                }
            };
            return Err((position, shortage));
        };
        taken.insert((resource, id));
        given.push(Some(Given { id: id.clone(), container: container.clone() }));
    }
    Ok(given)
}

/// The devices of a pod's containers, in words.
fn told(devices: &[ContainerDevices]) -> String {
    if devices.is_empty() {
        return "no devices: does any of them request the resource?".to_owned();
    }
    let mut text = String::new();
    for (number, ContainerDevices { container, resource, ids }) in devices.iter().take(SHOWN).enumerate() {
        let shown = ids.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(" ");
        let more = if ids.len() > SHOWN { " ..." } else { "" };
        let separator = if number == 0 { "" } else { "; " };
        // Writing to a string does not fail.
        let _ = write!(text, "{separator}{container}: {resource} {shown}{more}");
    }
    if devices.len() > SHOWN {
        text.push_str("; ...");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(container: &str, resource: &str, ids: &[&str]) -> ContainerDevices {
        let ids = ids.iter().map(|id| (*id).to_owned()).collect();
        ContainerDevices { container: container.to_owned(), resource: resource.to_owned(), ids }
    }

    /// The devices as `id@container`; `-` for a network without one.
    fn given(
        wants: &[&str],
        devices: &[ContainerDevices],
        used: &[(&str, &str)],
    ) -> Result<Vec<String>, String> {
        let mut parsed = Vec::new();
        for want in wants {
            let (resource, named) =
                want.split_once('=').map_or((*want, None), |(resource, id)| (resource, Some(id)));
            parsed.push((resource != "-").then_some(Want { resource, named }));
        }
        let used = used.iter().map(|(resource, id)| ((*resource).to_owned(), (*id).to_owned())).collect();
        let told =
            |given: Option<Given>| given.map_or("-".to_owned(), |it| format!("{}@{}", it.id, it.container));
        match allocate(&parsed, devices, &used) {
            Ok(given) => Ok(given.into_iter().map(told).collect()),
            Err((position, shortage)) => Err(format!("{position}: {shortage}")),
        }
    }

    #[test]
    fn each_network_gets_the_next_device_of_its_resource_in_the_order_of_the_annotation() {
        let devices = [
            row("web", "a/vf", &["0000:03:02.7", "0000:03:02.1"]),
            row("web", "a/gpu", &["gpu0"]),
            row("log", "a/vf", &["0000:03:02.3"]),
            row("log", "a/pf", &["0000:03:02.3"]),
        ];
        type Row<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], &'a [&'a str]);
        let table: [Row<'_>; 7] = [
            (&["-"], &[], &["-"]),
            // As the kubelet lists them, not as they sort.
            (&["-", "a/vf", "-", "a/vf"], &[], &["-", "0000:03:02.7@web", "-", "0000:03:02.1@web"]),
            (
                &["a/vf", "a/gpu", "a/vf", "a/vf"],
                &[],
                &["0000:03:02.7@web", "gpu0@web", "0000:03:02.1@web", "0000:03:02.3@log"],
            ),
            // A device that a selection names is for no other network, not even for an earlier one.
            (&["a/vf", "a/vf=0000:03:02.7"], &[], &["0000:03:02.1@web", "0000:03:02.7@web"]),
            (&["a/vf=0000:03:02.3", "a/vf"], &[], &["0000:03:02.3@log", "0000:03:02.7@web"]),
            // One more network for a live pod.
            (&["a/vf"], &[("a/vf", "0000:03:02.7"), ("a/pf", "0000:03:02.1")], &["0000:03:02.1@web"]),
            // Ids are of their resource.
            (&["a/pf", "a/vf=0000:03:02.3"], &[], &["0000:03:02.3@log", "0000:03:02.3@log"]),
        ];
        for (wants, used, expected) in table {
            assert_eq!(given(wants, &devices, used).unwrap(), expected, "{wants:?}");
        }
    }

    #[test]
    fn a_network_without_a_device_is_refused_with_what_the_containers_have() {
        let devices = [row("web", "a/vf", &["0000:03:02.1"]), row("log", "b/vf", &["x", "y"])];
        let had = "web: a/vf 0000:03:02.1; log: b/vf x y";
        let none_left = |position: usize, resource: &str, wanted: usize, had: &str| {
            format!(
                "{position}: no device of resource {resource} is left for the network: {wanted} networks of the pod need one, \
                 and its containers were given {had}"
            )
        };
        assert_eq!(given(&["a/vf", "-", "a/vf"], &devices, &[]).unwrap_err(), none_left(2, "a/vf", 2, had));
        assert_eq!(given(&["c/vf"], &devices, &[]).unwrap_err(), none_left(0, "c/vf", 1, had));
        let none = "no devices: does any of them request the resource?";
        assert_eq!(given(&["a/vf"], &[], &[]).unwrap_err(), none_left(0, "a/vf", 1, none));
        // A pod's author cannot name the device of another pod.
        assert_eq!(
            given(&["a/vf=0000:03:02.2"], &devices, &[]).unwrap_err(),
            format!(
                "0: deviceID 0000:03:02.2 is no device of resource a/vf that the pod has: its containers were given {had}"
            )
        );
        let many: Vec<ContainerDevices> = (0..20).map(|_| row("c", "r", &["d"; 20])).collect();
        let told = told(&many);
        assert!(told.ends_with("d d d d d d d d ...; ...") && told.len() < 300, "{told}");
    }
}
