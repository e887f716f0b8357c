//! What a DHCP client hears from its link: frames, messages, and the options of a lease.
//!
//! A panic, a hang or memory beyond what was sent is a finding; so is a message that changes on its way, or a lease with more
//! routes than a pod may have.

use netattach::budget;
use netattach::ipam::dhcp::{Message, Server, Terms, granted, read_frame, read_probe};
use netattach::mac::Mac;

pub(crate) fn check(data: &[u8]) {
    let own = Mac([2; 6]);
    assert_ne!(read_probe(data, own, [10, 1, 0, 7].into()), Some(own));
    let payload = read_frame(data).map(|(_, payload)| payload);
    for bytes in payload.into_iter().chain([data]) {
        let Ok(message) = Message::read(bytes) else { continue };
        assert_eq!(Message::read(&message.write()).as_ref(), Ok(&message));
        let server = Server { address: [10, 1, 0, 1].into(), mac: Mac([2; 6]) };
        if let Ok(terms) = Terms::of(&message, server, std::time::Duration::ZERO, None) {
            let lease = granted(&terms, &message.options, &[3, 6, 15, 33, 119, 121], None);
            assert!(lease.addresses.len() == 1 && lease.routes.len() <= budget::ROUTES.most);
        }
    }
}
