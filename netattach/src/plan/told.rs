//! Collects the contributions of an attachment's steps to its CNI result, one after the other. Pure.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{AttachmentPlan, Sandbox, addressing};
use crate::cni::{self, CniError, CniResult};
use crate::npwg::device_info::is_pci_address;
use crate::spec::{Device, DeviceId, Tune};
use crate::step::{Configure, Interface, LeasedAddress, MadeBy, Output, Role, SetDevice, Style};

/// The contributions so far. An output of another kind than the step's contributes nothing.
pub(super) struct Told<'p> {
    sandbox: &'p Sandbox,
    attachment: &'p AttachmentPlan,
    pub(super) result: CniResult,
    /// Index of the pod's interface among those of the result.
    pod: Option<usize>,
}

impl<'p> Told<'p> {
    /// Starts without contributions.
    pub(super) fn nothing(sandbox: &'p Sandbox, attachment: &'p AttachmentPlan) -> Self {
        Self { sandbox, attachment, result: CniResult::default(), pod: None }
    }

    /// The result of a plugin replaces the previous one; that of an IPAM plugin is added.
    pub(super) fn plugin(&mut self, role: Role, output: &Output) -> Result<(), CniError> {
        let Output::Delegate { result: printed } = output else { return Ok(()) };
        let printed = printed.read(self.attachment.version)?;
        match role {
            Role::Plugin => self.result = printed.clone(),
            Role::Ipam => {
                let ips = printed.ips.iter().map(|ip| (ip.address, ip.gateway));
                self.add_ips(ips);
                self.result.routes.extend(printed.routes.iter().cloned());
                self.result.dns = printed.dns.clone();
            }
        }
        Ok(())
    }

    pub(super) fn bridge(&mut self, output: &Output) {
        if let Output::Bridge(bridge) = output {
            self.result.interfaces.push(interface(&bridge.link, None));
        }
    }

    /// Adds both ends of a link that was created, or a device that was moved.
    pub(super) fn link(&mut self, output: &Output) {
        let Output::Link { host, pod: end, .. } = output else { return };
        self.result.interfaces.extend(host.iter().map(|host| interface(host, None)));
        let end = interface(end, Some(&self.sandbox.netns));
        self.push_pod(cni::Interface { pci_id: pci_id(self.attachment), ..end });
    }

    /// Adds the node's end of a device, and the pod's end if a process drives it: any other pod's end is added once
    /// it was moved.
    pub(super) fn device(&mut self, device: &Device, output: &Output) {
        let Output::Claimed(claim) = output else { return };
        let representor = claim.representor.iter().map(|it| interface(&it.device, None));
        self.result.interfaces.extend(representor);
        if device.userspace.is_none() {
            return;
        }
        let mac = claim.settings.as_ref().and_then(|settings| settings.mac);
        self.push_pod(cni::Interface {
            name: device.pod_name.clone(),
            mac: mac.filter(|mac| mac.0 != [0; 6]).map(|mac| mac.to_string()),
            sandbox: Some(self.sandbox.netns.clone()),
            pci_id: pci_id(self.attachment),
            ..Default::default()
        });
    }

    pub(super) fn set(&mut self, set: &SetDevice) {
        if let Some(mac) = set.mac
            && let Some(own) = self.pod.and_then(|pod| self.result.interfaces.get_mut(pod))
        {
            own.mac = Some(mac.to_string());
        }
    }

    /// Adds one loopback address for each family.
    pub(super) fn loopback(&mut self, output: &Output) {
        let Output::Loopback { addresses } = output else { return };
        self.push_pod(cni::Interface {
            name: "lo".into(),
            mac: Some("00:00:00:00:00:00".into()),
            sandbox: Some(self.sandbox.netns.clone()),
            ..Default::default()
        });
        let own = |is_ipv4: bool| {
            let is_own = |net: &&IpNet| net.addr().is_loopback() && net.addr().is_ipv4() == is_ipv4;
            addresses.iter().find(is_own).map(|address| (*address, None))
        };
        self.add_ips([own(true), own(false)].into_iter().flatten());
    }

    pub(super) fn lease(&mut self, output: &Output) {
        let Output::Lease { addresses, dns, routes, server: _ } = output else { return };
        let ips = addresses.iter().map(|leased| (leased.address, leased.gateway));
        self.add_ips(ips);
        self.result.routes.extend(routes.iter().cloned());
        self.result.dns = dns.clone();
    }

    /// Sets the node as the gateway of addresses that have none; `output`: the device that has a VLAN's gateway
    /// addresses.
    pub(super) fn gateway(&mut self, output: &Output) {
        if let Output::Gateway(device) = output {
            self.result.interfaces.push(interface(device, None));
        }
        for ip in self.result.ips.iter_mut().filter(|ip| ip.interface == self.pod) {
            ip.gateway = ip.gateway.or_else(|| addressing::first_host(ip.address));
        }
    }

    pub(super) fn tune(&mut self, tune: &Tune) {
        let of_pod = |one: &&mut cni::Interface| {
            one.sandbox.as_deref() == Some(&self.sandbox.netns) && one.name == self.attachment.ifname
        };
        if let Some(own) = self.result.interfaces.iter_mut().find(of_pod) {
            tuned(own, tune);
        }
    }

    /// Adds the effects of configuring the interface to the leased addresses and routes: netattach's own routes, and the
    /// addresses as they are in the pod.
    pub(super) fn configure(&mut self, configure: &Configure, leased: &[LeasedAddress]) {
        if configure.default_route || configure.style == Style::Routed {
            for route in addressing::pod_side(configure, leased, &self.result.routes).routes {
                if !self.result.routes.iter().any(|known| known.dst.trunc() == route.destination.trunc()) {
                    self.result.routes.push(cni::Route::new(route.destination, route.gateway));
                }
            }
        }
        if configure.style == Style::Routed {
            for ip in &mut self.result.ips {
                ip.address = ip.address.addr().into();
                ip.gateway = Some(addressing::link_gateway(ip.address.addr()));
            }
        }
        if configure.style == Style::PointToPoint {
            for ip in &mut self.result.ips {
                ip.gateway = ip.gateway.or_else(|| Some(addressing::link_gateway(ip.address.addr())));
            }
        }
        if let Some(dns) = &configure.dns {
            self.result.dns = dns.clone();
        }
    }

    /// Adds addresses, with their gateways, for the interface in the pod.
    fn add_ips(&mut self, ips: impl Iterator<Item = (IpNet, Option<IpAddr>)>) {
        let interface = self.pod;
        let ips = ips.map(|(address, gateway)| cni::IpConfig { interface, address, gateway });
        self.result.ips.extend(ips);
    }

    /// Adds the interface in the pod.
    fn push_pod(&mut self, interface: cni::Interface) {
        self.pod = Some(self.result.interfaces.len());
        self.result.interfaces.push(interface);
    }
}

/// Sets the Ethernet address and the MTU that an interface was given in a result; the MTU only if the result has one.
pub fn tuned(interface: &mut cni::Interface, tune: &Tune) {
    if let Some(mac) = tune.properties.mac {
        interface.mac = Some(mac.to_string());
    }
    if let (Some(mtu), Some(_)) = (tune.properties.mtu, interface.mtu) {
        interface.mtu = Some(mtu);
    }
}

/// Returns the PCI address of the attachment's device, if it has one.
fn pci_id(attachment: &AttachmentPlan) -> Option<String> {
    match attachment.made_by() {
        MadeBy::Device(Device { id: DeviceId::Bus(name), .. }) if is_pci_address(name) => Some(name.clone()),
        _ => None,
    }
}

fn interface(made: &Interface, sandbox: Option<&str>) -> cni::Interface {
    cni::Interface {
        name: made.name.clone(),
        mac: made.mac.map(|mac| mac.to_string()),
        mtu: Some(made.mtu).filter(|mtu| *mtu != 0),
        sandbox: sandbox.map(str::to_owned),
        ..Default::default()
    }
}
