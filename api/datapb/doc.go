// Package datapb is the generated code of the data service, by which data of a whole cluster enter and leave.
package datapb
