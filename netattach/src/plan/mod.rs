//! A request and the facts about the node become ordered steps with inverses. Pure.
