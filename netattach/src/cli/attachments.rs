//! `netattachctl attachments`: the table of attachments.

use ipnet::IpNet;

use super::table::{self, Align::Left};
use super::{name_cells, or_dash};
use crate::rpc::message::Attachment;

/// The table, or `nothing` if there are no rows.
pub(super) fn render(rows: &[Attachment], nothing: &str) -> String {
    if rows.is_empty() {
        return nothing.to_owned();
    }
    let columns = [
        "POD",
        "NETWORK",
        "INTERFACE",
        "KIND",
        "MAC",
        "ADDRESSES",
        "HOST-INTERFACE",
        "ENFORCED",
        "FAST-PATH",
        "STATE",
    ];
    let cells: Vec<_> = rows.iter().map(row).collect();
    table::render(columns.map(|title| (title, Left)), &cells)
}

fn row(attachment: &Attachment) -> [String; 10] {
    let [pod, network, ifname] = name_cells(&attachment.name);
    let addresses = attachment.addresses.iter().map(IpNet::to_string).collect::<Vec<_>>().join(",");
    [
        pod,
        network,
        ifname,
        attachment.kind.to_string(),
        or_dash(attachment.mac),
        or_dash(Some(addresses).filter(|text| !text.is_empty())),
        or_dash(attachment.host_interface.as_ref()),
        attachment.enforcement.to_string(),
        or_dash(attachment.fast_path.as_ref().map(|fast_path| &fast_path.state)),
        attachment.state.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::tests::name;
    use super::*;
    use crate::mac::Mac;
    use crate::rpc::message::{FastPath, Kind, Level, State};

    #[test]
    fn every_attachment_is_a_line() {
        let rows = [
            Attachment {
                name: name(1, "shop/cart-0", "default", "eth0"),
                container_id: "abc".to_owned(),
                kind: Kind::Native("bridge".to_owned()),
                mac: Some(Mac([2, 0, 0, 0, 0, 1])),
                addresses: vec!["10.1.0.2/24".parse().unwrap(), "2001:db8::2/64".parse().unwrap()],
                host_interface: Some("na1f00d".to_owned()),
                enforcement: Level::Full,
                enforcement_detail: String::new(),
                programs_wait: false,
                fast_path: Some(FastPath { state: "on".to_owned(), detail: String::new() }),
                state: State::Attached,
            },
            Attachment {
                name: name(2, "", "shop/storage", "net1"),
                container_id: "def".to_owned(),
                kind: Kind::Exec("sriov".to_owned()),
                mac: None,
                addresses: vec![],
                host_interface: None,
                enforcement: Level::None,
                enforcement_detail: "the pod has no interface of that name".to_owned(),
                programs_wait: false,
                fast_path: None,
                state: State::Attaching,
            },
        ];
        assert_eq!(
            render(&rows, "nothing"),
            "\
POD          NETWORK       INTERFACE  KIND        MAC                ADDRESSES                   HOST-INTERFACE  ENFORCED  FAST-PATH  STATE
shop/cart-0  default       eth0       bridge      02:00:00:00:00:01  10.1.0.2/24,2001:db8::2/64  na1f00d         full      on         attached
-            shop/storage  net1       exec:sriov  -                  -                           -               none      -          attaching
"
        );
        assert_eq!(render(&[], "nothing"), "nothing");
    }
}
