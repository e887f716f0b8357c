//! Converts between the model of policies and the messages of the socket.
//!
//! The agent converts its model to messages. The command line converts an answer back to the model to print it.

use crate::policy::{dump, explain, level};
use crate::rpc::message::{self, explain as wire};

/// Converts between two enums with the same variants, both ways. Fields are converted by `Into`.
macro_rules! same_variants {
    ($model:path, $message:path: $($variant:ident $(($value:ident))? $({ $($field:ident),+ })?),+ $(,)?) => {
        impl From<$model> for $message {
            fn from(value: $model) -> Self {
                use $model as Model;
                match value {
                    $(Model::$variant $(($value))? $({ $($field),+ })? =>
                        Self::$variant $(($value.into()))? $({ $($field: $field.into()),+ })?,)+
                }
            }
        }

        impl From<$message> for $model {
            fn from(value: $message) -> Self {
                use $message as Message;
                match value {
                    $(Message::$variant $(($value))? $({ $($field),+ })? =>
                        Self::$variant $(($value.into()))? $({ $($field: $field.into()),+ })?,)+
                }
            }
        }
    };
}

same_variants!(level::Level, message::Level: None, Advisory, FullUnlessPrivileged, Full);
same_variants!(explain::Form, wire::Form: Opening, Segment, Fragment, Link, Ethertype(number));
same_variants!(explain::End, wire::End: Pod(pod), Address(address));
same_variants!(explain::Missing, wire::Missing: Peer, Excepted(net), Port(rules));
same_variants!(
    explain::Leg, wire::Leg:
    NotHere,
    NotIsolated,
    Allowed { policy, peer, class, rule, by },
    Unenforced { selected_by, why },
    AcceptedIcmp,
    KeepsLink,
    Named,
    Infrastructure,
    NotIp { selected_by },
    Midstream,
    Denied { policy, selected_by, missing },
    OverCapacity { selected_by },
    Unknown { policy },
);

/// Converts between two structs with the same fields, both ways, each field as specified.
macro_rules! same_fields {
    ($model:path, $message:path: $($field:ident $by:ident),+ $(,)?) => {
        impl From<$model> for $message {
            fn from(value: $model) -> Self {
                Self { $($field: $by(value.$field)),+ }
            }
        }

        impl From<$message> for $model {
            fn from(value: $message) -> Self {
                Self { $($field: $by(value.$field)),+ }
            }
        }
    };
}

same_fields!(explain::Asked, wire::Asked: protocol one, port one, form one);
same_fields!(explain::Question, wire::Question: from one, to one, traffic one);
same_fields!(explain::Named, wire::Named: pod maybe, address one);
same_fields!(explain::Limit, wire::Limit: of one, enforcement one, why one);
same_fields!(
    explain::Path, wire::Path:
    network one,
    from one,
    to one,
    traffic one,
    egress one,
    ingress one,
    translated one,
    limits each,
);
same_fields!(dump::Use, message::dump::Use: attachment one, ingress one, egress one);
same_fields!(dump::Rule, message::dump::Rule: rule one, from one);
same_fields!(dump::Peer, message::dump::Peer: net one, class one);
same_fields!(dump::Port, message::dump::Port: class one, traffic one, rule one);
same_fields!(
    dump::Dump, message::Dump:
    policy one,
    attachments each,
    rules each,
    peers each,
    ports each,
    left_out one,
);

fn one<T: Into<U>, U>(value: T) -> U {
    value.into()
}

fn maybe<T: Into<U>, U>(value: Option<T>) -> Option<U> {
    value.map(Into::into)
}

fn each<T: Into<U>, U>(values: Vec<T>) -> Vec<U> {
    values.into_iter().map(Into::into).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::rpc::message::{Request, Response};

    /// All messages of the golden files survive conversion to the model and back.
    #[test]
    fn messages_are_the_same_by_way_of_the_model() {
        let golden = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        let requests = golden(include_str!("rpc/golden/requests.json"));
        let requests: Vec<Request> = serde_json::from_value(requests["requests"].clone()).unwrap();
        let questions = requests.into_iter().filter_map(|request| match request {
            Request::Explain(question) => Some(question),
            _ => None,
        });
        for question in questions {
            assert_eq!(wire::Question::from(explain::Question::from(question.clone())), question);
        }
        let responses = golden(include_str!("rpc/golden/responses.json"));
        let responses: Vec<Response> = serde_json::from_value(responses["responses"].clone()).unwrap();
        for response in responses {
            match response {
                Response::Explanation(paths) => {
                    let model: Vec<explain::Path> = each(paths.clone());
                    assert_eq!(each::<_, wire::Path>(model), paths);
                }
                Response::PolicyDump(dumps) => {
                    let model: Vec<dump::Dump> = each(dumps.clone());
                    assert_eq!(each::<_, message::Dump>(model), dumps);
                }
                _ => {}
            }
        }
    }
}
